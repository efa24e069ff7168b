"""Prefixes: the tree, what goes first, and the engine with it."""
