"""The numbers that figures show, as arrays; nothing here draws."""
