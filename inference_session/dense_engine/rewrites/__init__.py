"""How a network is divided, and written anew, when it is opened."""
