"""What examples/train_gpt.py is made of: configuration, text, model, matmuls, optimizer phase, checkpoints, report."""
