"""What training needs to go on, saved and brought back."""
