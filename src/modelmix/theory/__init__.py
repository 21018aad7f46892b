"""The paper's theorems as functions: utility, clipping, amplification, randomness beyond noise. Never imports torch."""
