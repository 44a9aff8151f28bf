// Whether a ticket may join: when it would be done, and whether one that was admitted before would then be late. Pure.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ticket.hpp"

namespace treadle::dataplane {

// What stands at the moment of the question. `running_ns`: what is left of the pieces in flight, all workers together.
struct Load {
    int64_t now_ns, running_ns;
    int workers;

    int64_t finish_ns(int64_t before_ns, const Work& work) const noexcept { return now_ns + (running_ns + before_ns) / workers + work.span_ns; }
};

// `admitted`: in the order in which they will run; work of an earlier or the same deadline runs before `asked`.
//
// Work that is there is shared evenly by the workers: with one worker the finish is exact, with several it is short by at most
// one piece. An admitted ticket that would be late anyway refuses nobody.
template <typename Admitted>
Verdict judge(const Load& load, const Work& asked, const Admitted& admitted) {
    int64_t before_ns = 0;
    auto at = admitted.begin();
    for (; at != admitted.end(); ++at) {
        const Work& work = *at;
        if (work.deadline_ns > asked.deadline_ns) break;
        before_ns += work.work_ns;
    }
    int64_t finish_ns = load.finish_ns(before_ns, asked);
    bool fits = asked.deadline_ns == NO_DEADLINE || finish_ns <= asked.deadline_ns;
    for (; at != admitted.end(); ++at) {
        const Work& work = *at;
        if (work.deadline_ns == NO_DEADLINE) break;
        const bool made_it = load.finish_ns(before_ns, work) <= work.deadline_ns;
        const bool makes_it = load.finish_ns(before_ns + asked.work_ns, work) <= work.deadline_ns;
        before_ns += work.work_ns;
        if (made_it && !makes_it) {  // it would have to run behind this one
            finish_ns = load.finish_ns(before_ns, asked);
            fits = false;
        }
    }
    return {fits ? Fault::none : Fault::late, finish_ns, 0, fits ? Reason::none : Reason::late};
}

}  // namespace treadle::dataplane
