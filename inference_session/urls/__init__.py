"""URLs of stores and brokers, as in settings: parsed, and shown without their passwords."""
