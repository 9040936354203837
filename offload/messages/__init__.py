"""Plans and reports, which travel between processes. Plain values."""
