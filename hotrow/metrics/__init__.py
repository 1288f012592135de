"""The metrics of a running server, as `hotrow top` and `hotrow versions` show them."""
