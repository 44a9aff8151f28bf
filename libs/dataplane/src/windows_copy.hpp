// Windows that came from a stranger: a private copy, and whether they are what a hash may read.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "fault.hpp"
#include "treadle/kernels/hash.hpp"
#include "treadle/kernels/windows.hpp"

namespace treadle::dataplane {

// Owns its arrays. `dead` arrays hold 0 or 1 only, whatever came.
struct WindowsCopy {
    std::vector<int64_t> tokens, lookback;
    std::vector<int32_t> starts;
    std::unique_ptr<bool[]> dead, lookback_dead;
    int64_t lookback_columns = 0;

    kernels::WindowsView view() const noexcept {
        kernels::WindowsView view{};
        view.tokens = tokens.data();
        view.token_count = static_cast<int64_t>(tokens.size());
        view.starts = starts.data();
        view.request_count = static_cast<int64_t>(starts.size()) - 1;
        view.lookback = lookback.data();
        view.lookback_columns = lookback_columns;
        view.dead = dead.get();
        view.lookback_dead = lookback_dead.get();
        return view;
    }
};

// What `treadle.contract.Windows` and `check_lookup` ask for: starts rise from 0 to the number of tokens, look-back wide enough
// for the plan, no token below 0 and no look-back below -1, every id that is not dead below the plan's limit.
inline Fault check_windows(const kernels::HashPlanView& plan, const WindowsCopy& windows) noexcept {
    const kernels::WindowsView view = windows.view();
    if (view.lookback_columns < plan.order_max - 1 || windows.starts.front() != 0 || windows.starts.back() != view.token_count)
        return Fault::invalid;
    for (size_t i = 1; i < windows.starts.size(); ++i)
        if (windows.starts[i] < windows.starts[i - 1]) return Fault::invalid;
    for (const int64_t token : windows.tokens)
        if (token < 0) return Fault::invalid;
    for (const int64_t token : windows.lookback)
        if (token < -1) return Fault::invalid;
    return kernels::tokens_in_range(plan, view) ? Fault::none : Fault::invalid;
}

}  // namespace treadle::dataplane
