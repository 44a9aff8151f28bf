// Where rows lie.
#pragma once

#include <cstdint>

namespace treadle::dataplane {

// What a row costs depends on where it lies; admission keeps a cost for each, metrics a label.
enum class Tier : int32_t { memory = 0, disk = 1, remote = 2 };

inline constexpr int TIERS = 3;

}  // namespace treadle::dataplane
