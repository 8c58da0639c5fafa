"""Reading what Python functions compute, from their syntax: no code of a user's runs."""
