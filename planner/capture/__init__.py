"""Model file -> captured graph -> layers -> stages that run: seeds, relayed gradients, split backward (torch)."""
