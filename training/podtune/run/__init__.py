"""What both programs share: errors, the world, the record of a run, checkpoints, tracking. No trl here."""
