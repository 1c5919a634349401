"""Training on rewards: GRPO, RLOO and PPO on completions that the trained model samples."""
