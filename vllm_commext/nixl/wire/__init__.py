"""What crosses between engines: messages, request parameters, seals, the side channel's client."""
