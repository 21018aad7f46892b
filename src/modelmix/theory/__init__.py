"""What advice on clips and the price of mixing need of the paper's theorems. Never imports torch."""
