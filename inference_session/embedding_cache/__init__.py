"""The hottest rows of all tables of a model, within a budget of bytes."""
