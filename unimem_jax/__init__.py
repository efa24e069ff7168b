"""One arena for every kind of token state of a hybrid language model."""
