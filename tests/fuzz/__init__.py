"""Untrusted files and messages, damaged at random: with any content, readers raise only hotrow's own errors."""
