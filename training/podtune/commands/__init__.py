"""The subcommands of podtune, one file a group. Heavy imports happen when a command runs."""
