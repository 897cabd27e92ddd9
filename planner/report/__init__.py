"""What people see: tables, explanations, timelines."""
