"""The price list: what each format of weights and of the KV cache costs, and what it buys."""
