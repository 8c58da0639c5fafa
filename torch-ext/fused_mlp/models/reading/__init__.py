"""Python functions as they are written: their syntax, and attributes that are looked up without running code."""
