"""What people look at: plots, pictures, videos, tables."""
