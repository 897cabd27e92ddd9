"""The layer graph over networkx.DiGraph: cuts, tensors that cross them, stages that follow."""
