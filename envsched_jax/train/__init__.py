"""Training: advantages, the GRPO objective and its update."""
