"""How much the answers of two versions differ, and how good they are."""
