"""Networks for requests that give their context once; context/ divides the graph."""
