"""BatchNorm whose statistics do not see the layout: of groups of samples, or of a whole step."""
