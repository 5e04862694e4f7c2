"""The shared pool: KV blocks by content, kept across engines, restarts and evictions."""
