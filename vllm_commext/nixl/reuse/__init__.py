"""KV blocks of finished requests that other engines may read: by hash, without being kept."""
