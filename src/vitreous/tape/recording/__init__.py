"""What is kept of one forward pass, and how its calls are intercepted."""
