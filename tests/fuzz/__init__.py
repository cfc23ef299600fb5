"""Bad input for every file and option that a user gives: a campaign, and its known cases."""
