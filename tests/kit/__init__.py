"""What the tests stand on: real servers, a network that fails on command, and patient waiting."""
