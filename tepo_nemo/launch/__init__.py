"""How a command becomes running ranks, and how they end."""
