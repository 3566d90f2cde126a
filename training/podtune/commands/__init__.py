"""The subcommands of podtune, one file a group. What loads torch is imported when a command runs."""
