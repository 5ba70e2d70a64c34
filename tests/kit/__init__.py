"""What tests of several folders share, and no user needs."""
