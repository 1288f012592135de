"""The checks of `hotrow doctor`."""
