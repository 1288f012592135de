"""Whether the samples of a batch may be computed together, which has to be proved operator by operator."""
