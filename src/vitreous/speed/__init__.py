"""What methods cost: operations that do not depend on the machine, and time beside plain passes and peers."""
