"""Rows that training changes, sent to the servers while it trains."""
