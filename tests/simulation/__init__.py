"""A whole fleet on a virtual clock, and an adversary that puts it to the test."""
