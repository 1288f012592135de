"""URLs of stores and brokers, as settings have them: parsed, and shown without their passwords."""
