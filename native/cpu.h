// Which kernel tables this CPU can run.
#pragma once
#include <string>
#include <vector>

#include "kernels.h"

namespace paceline {

// Tables that were built and that this CPU and its kernel can run, best first; scalar is always the last.
const std::vector<const KernelTable*>& usable_tables();

// The table named `isa`; empty: what PACELINE_ISA names, else the best. Throws std::invalid_argument that lists the
// usable ones.
const KernelTable& choose_table(const std::string& isa);

}  // namespace paceline
