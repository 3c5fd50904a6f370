"""Pictures of explanations: overlays, comparisons; none of them touches pyplot or any other global state."""
