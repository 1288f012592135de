"""How a model trains: network, tables, optimizers, losses and metrics, batch by batch."""
