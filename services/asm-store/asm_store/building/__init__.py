"""How dictionaries are built, apart from the service: needs torch and a model (the extra `builder`)."""
