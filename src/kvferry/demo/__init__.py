# SPDX-License-Identifier: Apache-2.0
"""A hand-over between two engines of different shape on one machine, with every byte checked."""
