"""What a model's answers are worth: perplexity, fidelity to a reference, tasks, loops."""
