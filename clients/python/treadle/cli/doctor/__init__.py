"""What this machine has for the fabric, what that means, and how to get more."""
