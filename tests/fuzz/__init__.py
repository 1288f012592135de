"""Files and messages that nobody should trust, damaged at random: whatever they hold, only errors of ours come out."""
