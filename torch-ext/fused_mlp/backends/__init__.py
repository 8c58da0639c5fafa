"""Ways to compute the operations of the package.

Every backend is a module with the same functions over operands that ``functional`` has checked, the activation given
by its code, and ``refusal(op, x)``: why it does not take a call on ``x``, or None if it does. No backend knows another.
"""
