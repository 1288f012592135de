"""What commands print and write: text, tables, progress, JSON and pages."""
