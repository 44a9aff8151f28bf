// Lookups over owners: who is asked for what, when another is asked as well, who is asked instead. Result: all rows, or a fault.
//
// All of it runs inside the reactor but for the making of a call (hash and split), which is its caller's.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "remote_call.hpp"

namespace treadle::dataplane {

struct Share {
    int owner;
    AskRef work;
};

// Rows to owners, passing by those in `tried`: for each stretch its first candidate that is worth asking. Empty: some row has none.
class Split {
public:
    Split(const Call& call, uint64_t tried, int64_t now) : call_(call), tried_(tried), now_(now) {}

    std::vector<Share> whole(const std::vector<AskRef>& works) const {
        std::vector<int32_t> all(call_.spread->owners.size());
        for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<int32_t>(i);
        const int owner = choose(all.data(), static_cast<int>(all.size()));
        std::vector<Share> made;
        if (owner >= 0)
            for (const AskRef& work : works) made.push_back({owner, work});
        return made;
    }

    // `segments`: ids and positions, of layers that are still wanted.
    std::vector<Share> rows(const std::vector<Segment>& segments, const std::vector<int>& places) const {
        std::map<int, std::vector<Segment>> shares;
        for (const Segment& segment : segments)
            if (!share(segment, *call_.spread->routes[static_cast<size_t>(places[static_cast<size_t>(segment.layer)])], shares)) return {};
        std::vector<Share> made;
        for (auto& [owner, mine] : shares)
            for (std::vector<Segment>& each : cut(std::move(mine), call_.row_bytes)) made.push_back({owner, gather_work(std::move(each), call_.numbers, call_.row_bytes)});
        return made;
    }

private:
    bool share(const Segment& segment, const Routes& routes, std::map<int, std::vector<Segment>>& shares) const {
        std::vector<int> chosen(routes.bounds.size(), UNCHOSEN);  // by stretch
        std::vector<Segment*> open(call_.spread->owners.size(), nullptr);
        for (size_t i = 0; i < segment.ids.size(); ++i) {
            const auto stretch = static_cast<size_t>(routes.candidates(segment.ids[i]) - routes.owners.data()) / static_cast<size_t>(routes.replicas);
            int& owner = chosen[stretch];
            if (owner == UNCHOSEN) owner = choose(routes.owners.data() + stretch * static_cast<size_t>(routes.replicas), routes.replicas);
            if (owner < 0) return false;
            Segment*& mine = open[static_cast<size_t>(owner)];
            if (!mine) mine = begin(shares[owner], segment.layer);
            mine->ids.push_back(segment.ids[i]);
            mine->positions.push_back(segment.positions.empty() ? static_cast<int64_t>(i) : segment.positions[i]);
        }
        return true;
    }

    static Segment* begin(std::vector<Segment>& segments, int layer) {
        segments.push_back({layer, 0, 0, {}, {}});
        return &segments.back();
    }

    int choose(const int32_t* candidates, int count) const {
        int second = -1;
        for (int i = 0; i < count; ++i) {
            const int32_t owner = candidates[i];
            if (owner < 0 || static_cast<size_t>(owner) >= call_.spread->owners.size() || (tried_ >> owner & 1)) continue;
            const OwnerRef& known = call_.spread->owners[static_cast<size_t>(owner)];
            if (!known) continue;
            if (known->usable(now_)) return owner;
            if (second < 0) second = owner;
        }
        return second;
    }

    static constexpr int UNCHOSEN = -2;
    const Call& call_;
    const uint64_t tried_;
    const int64_t now_;
};

class RemoteClient final : public Part::Events, public std::enable_shared_from_this<RemoteClient> {
public:
    static constexpr int CONNECTIONS_MAX = 4;          // to one owner
    static constexpr double HEDGE_SHARE = 0.1;         // of requests
    static constexpr double HEDGES_SAVED_MAX = 16;     // for a moment in which several are slow
    static constexpr size_t CALLS_MAX = 4096;          // in flight

    RemoteClient(HubRef hub, RemoteVersionRef version)
        : hub_(std::move(hub)), counters_(hub_->counters), reactor_(hub_->reactor), version_(std::move(version)) {}

    // Layers in the order in which they are wanted. Refused: too much in flight, or closed; then no ticket ends.
    Fault start(const CallRef& call, std::vector<Share> shares) {
        {
            std::lock_guard lock(mutex_);
            if (closed_) return Fault::unavailable;
            if (in_flight_ >= CALLS_MAX) return Fault::refused;
            ++in_flight_;
        }
        call->layers_open = call->layers.size();
        auto self = shared_from_this();
        const bool posted = reactor_->post([self, call, shares = std::move(shares)]() mutable { self->begin(call, std::move(shares)); });
        if (posted) return Fault::none;
        std::lock_guard lock(mutex_);
        --in_flight_;
        return Fault::unavailable;
    }

    // The layer's ticket ends soon, and nobody writes to its buffer afterwards. False, and it never ends: the reactor is closed.
    bool cancel(const CallRef& call, size_t layer) {
        auto self = shared_from_this();
        return reactor_->post([self, call, layer] {
            self->end_layer(*call, call->layers[layer], State::cancelled, Fault::none);
            self->end_if_over(call);
        });
    }

    // Ends every call as cancelled; the owners' connections go with the last client that uses them. Once it has returned
    // from `posted`, nobody writes to a buffer.
    void close(std::function<void()> posted) {
        {
            std::lock_guard lock(mutex_);
            closed_ = true;
        }
        auto self = shared_from_this();
        if (!reactor_->post([self, posted] {
                const auto calls = self->calls_;
                for (const CallRef& call : calls) self->end_call(call, State::cancelled, Fault::none);
                posted();
            }))
            posted();
    }

    // Tickets that have ended since the last call: their arrays may go, on the caller's thread.
    std::vector<TicketRef> take_finished() {
        std::lock_guard lock(mutex_);
        return std::exchange(finished_, {});
    }

    // After a `cancel` that said false: returns when nobody writes to a buffer any more. Not from inside the reactor.
    void wait_closed() { reactor_->close(); }

    const RemoteVersionRef& version() const noexcept { return version_; }

private:
    void begin(const CallRef& call, std::vector<Share> shares) {
        counters_.requests_total += 1;
        hedges_saved_ = std::min(HEDGES_SAVED_MAX, hedges_saved_ + HEDGE_SHARE);
        calls_.insert(call);
        call->giving_up = reactor_->at(call->give_up_ns, [this, self = shared_from_this(), call] {
            call->giving_up = reactor_->none();
            end_call(call, State::failed, call->fault == Fault::none ? Fault::late : call->fault);
        });
        if (shares.empty()) return fail(call, Fault::unavailable);  // no owner, or none for some row
        for (Share& share : shares) add(call, std::move(share), 0, nullptr);
        const std::vector<PartRef> parts = call->parts;
        for (const PartRef& part : parts) ask(part);
    }

    PartRef add(const CallRef& call, Share share, uint64_t tried, PartRef parent) {
        auto part = std::make_shared<Part>(*this, call, std::move(share.work), share.owner, tried);
        part->timer = reactor_->none();
        part->parent = std::move(parent);
        if (!part->parent)
            for (const Segment& segment : part->work->segments) ++call->layers[static_cast<size_t>(segment.layer)].segments_left;
        call->parts.push_back(part);
        return part;
    }

    // -- asking --

    void ask(const PartRef& part) {
        if (part->over || part->call->over()) return;
        const OwnerRef owner = part->call->spread->owners[static_cast<size_t>(part->owner)];
        const auto connection = owner ? connection_to(owner) : nullptr;
        if (!connection) return on_failure(*part, {Fault::unavailable}, "");
        part->prepare();
        part->connection = connection;
        const int64_t now = now_ns();
        FrameHeader header = part->call->header;
        header.deadline_ns = deadline_for_owners(*part->call, now);
        part->lost = false;
        arm_hedge(part, *owner, now);
        connection->send(header, part->work, part, part->request);
    }

    std::shared_ptr<Connection> connection_to(const OwnerRef& owner) {
        std::shared_ptr<Connection> best;
        for (const auto& each : owner->connections)
            if (!each->full() && (!best || each->flights() < best->flights())) best = each;
        if ((best && best->flights() == 0) || owner->connections.size() >= CONNECTIONS_MAX) return best;
        if (now_ns() < owner->backoff_until_ns) return best;
        auto made = std::make_shared<Connection>(*reactor_, counters_, *owner);
        if (!made->open()) {
            owner->failed(now_ns());
            return best;
        }
        owner->connections.push_back(made);
        return made;
    }

    // When the reply is later than it should be, or the deadline leaves just enough time for another owner to answer.
    void arm_hedge(const PartRef& part, const Owner& owner, int64_t now) {
        reactor_->forget(part->timer);
        if (part->parent || part->call->spread->owners.size() < 2 || part->call->deadline_ns == NO_DEADLINE) return;
        const int64_t slow = owner.latency.slow_ns(part->work->reply_bytes);
        const int64_t last_chance = part->call->deadline_ns - 2 * slow - HEDGE_MARGIN_NS;
        const int64_t at = std::max(now + slow, std::min(last_chance, now + 8 * slow + HEDGE_PATIENCE_NS));
        part->timer = reactor_->at(at, [this, weak = std::weak_ptr<Part>(part)] {
            if (const PartRef part = weak.lock()) {
                part->timer = reactor_->none();
                hedge(part);
            }
        });
    }

    void hedge(const PartRef& part) {
        if (part->over || part->call->over() || !part->hedges.empty()) return;
        std::vector<Share> shares = others(*part, part->tried | bit(part->owner));
        if (shares.empty()) return;
        if (hedges_saved_ < static_cast<double>(shares.size())) {
            ++counters_.hedges_unpaid_total;
            return;
        }
        hedges_saved_ -= static_cast<double>(shares.size());
        counters_.hedges_total += shares.size();
        part->hedges_left = shares.size();
        for (Share& share : shares) part->hedges.push_back(add(part->call, std::move(share), part->tried | bit(part->owner), part));
        const std::vector<PartRef> hedges = part->hedges;
        for (const PartRef& each : hedges) ask(each);
    }

    // The part's rows that are still wanted, over owners that are not in `tried`.
    std::vector<Share> others(const Part& part, uint64_t tried) const {
        const Split split(*part.call, tried, now_ns());
        if (part.call->whole) return split.whole({part.work});
        std::vector<Segment> left;
        for (size_t i = 0; i < part.work->segments.size(); ++i)
            if (part.wants(i)) left.push_back(part.work->segments[i]);
        return split.rows(left, places(*part.call));
    }

    std::vector<int> places(const Call& call) const {
        std::vector<int> places;
        for (const int32_t number : call.numbers) places.push_back(version_->position(number));
        return places;
    }

    // -- what parts tell --

    void on_segment(Part& part, size_t index) override {
        if (!part.parent) count_segment(part, index);
    }

    void count_segment(Part& part, size_t index) {
        const CallRef call = part.call;
        CallLayer& layer = call->layers[static_cast<size_t>(part.work->segments[index].layer)];
        layer.came.push_back({part.work, index});
        if (--layer.segments_left > 0) return;
        end_layer(*call, layer, State::complete, Fault::none);
        if (now_ns() > call->deadline_ns) ++counters_.late_total;
        end_if_over(call);
    }

    void on_whole(Part& part) override {
        const PartRef keep = part.shared_from_this();
        part.connection.reset();
        retire(part);
        if (const PartRef parent = std::exchange(part.parent, nullptr); parent && !parent->over && --parent->hedges_left == 0) overtake(*parent);
    }

    // All hedges have come: their rows are the part's.
    void overtake(Part& part) {
        const PartRef keep = part.shared_from_this();
        ++counters_.hedges_won_total;
        if (const OwnerRef& owner = part.call->spread->owners[static_cast<size_t>(part.owner)]) owner->overtaken(now_ns());
        for (size_t i = 0; i < part.segment_done.size(); ++i)
            if (part.wants(i)) {
                part.segment_done[i] = true;
                count_segment(part, i);
            }
        retire(part);
    }

    void on_failure(Part& part, const Verdict& why, std::string_view said) override {
        const PartRef keep = part.shared_from_this();
        if (part.over || part.call->over()) return;
        Call& call = *part.call;
        call.fault = why.fault;
        call.said = said;
        if (why.reason != Reason::none || why.retry_after_ns > 0) call.refusal = why;
        part.unavailable |= why.fault == Fault::unavailable;
        part.tried |= bit(part.owner);
        reactor_->forget(part.timer);
        part.lost = true;
        if (part.hedges.empty()) pass_on(keep);  // else a replica has been asked already
    }

    // Asks other owners for what this part was to bring; where none is left, the same ones a little later, if they may come back.
    void pass_on(const PartRef& part) {
        std::vector<Share> shares = others(*part, part->tried);
        if (!shares.empty()) {
            ++counters_.failovers_total;
            return hand_over(part, std::move(shares));
        }
        if (part->parent) return give_up_hedge(part);
        if (!part->unavailable) return fail(part->call, part->call->fault);
        part->pause_ns = std::clamp(part->pause_ns * 2, RETRY_MIN_NS, RETRY_MAX_NS);
        part->timer = reactor_->at(now_ns() + part->pause_ns, [this, weak = std::weak_ptr<Part>(part)] {
            if (const PartRef part = weak.lock(); part && !part->over && !part->call->over()) {
                part->timer = reactor_->none();
                part->tried = 0;
                part->unavailable = false;
                refresh(*part->call);
                pass_on(part);
            }
        });
    }

    // A call that could not be served looks where the owners are now.
    void refresh(Call& call) {
        const auto now = version_->spread();
        bool routed = now->owners.size() <= static_cast<size_t>(OWNERS_MAX);
        for (const int place : places(call)) routed &= call.whole || now->routes[static_cast<size_t>(place)] != nullptr;
        if (routed && now->owners.size() >= call.spread->owners.size()) call.spread = now;  // an index never changes its meaning
    }

    void hand_over(const PartRef& part, std::vector<Share> shares) {
        if (part->call->whole) {  // the same work for another
            part->owner = shares.front().owner;
            return ask(part);
        }
        const CallRef call = part->call;
        std::vector<PartRef> heirs;
        for (Share& share : shares) {
            heirs.push_back(add(call, std::move(share), part->tried, part->parent));
            heirs.back()->unavailable = part->unavailable;
            heirs.back()->pause_ns = part->pause_ns;
        }
        if (part->parent) {
            part->parent->hedges_left += heirs.size() - 1;
            part->parent->hedges.insert(part->parent->hedges.end(), heirs.begin(), heirs.end());
        } else {
            for (size_t i = 0; i < part->segment_done.size(); ++i)
                if (!part->segment_done[i]) --call->layers[static_cast<size_t>(part->work->segments[i].layer)].segments_left;
        }
        retire(*part);
        for (const PartRef& heir : heirs) ask(heir);
    }

    // A hedge that nobody can bring: the part is what it was before, and if its owner has failed too, it is passed on.
    void give_up_hedge(const PartRef& hedge) {
        const PartRef part = hedge->parent;
        part->tried |= hedge->tried;
        part->unavailable |= hedge->unavailable;
        for (const PartRef& each : std::exchange(part->hedges, {})) retire(*each);
        part->hedges_left = 0;
        if (part->lost) pass_on(part);
    }

    // -- endings --

    void retire(Part& part) {
        const PartRef keep = part.shared_from_this();
        if (std::exchange(part.over, true)) return;
        reactor_->forget(part.timer);
        if (const auto connection = part.connection.lock()) connection->abandon(part.request);
        part.connection.reset();
        for (const PartRef& hedge : std::exchange(part.hedges, {})) retire(*hedge);
        auto& parts = part.call->parts;
        parts.erase(std::remove(parts.begin(), parts.end(), keep), parts.end());
    }

    void fail(const CallRef& call, Fault fault) { end_call(call, State::failed, fault); }

    void end_call(const CallRef& call, State state, Fault fault) {
        for (CallLayer& layer : call->layers) end_layer(*call, layer, state, fault);
        end_if_over(call);
    }

    void end_layer(Call& call, CallLayer& layer, State state, Fault fault) {
        if (layer.ticket->ended()) return;
        layer.ticket->fault = fault;
        if (fault != Fault::none && fault == call.fault) layer.said = call.said;
        --call.layers_open;
        layer.ticket->end(state);
        std::lock_guard lock(mutex_);
        finished_.push_back(layer.ticket);
    }

    void end_if_over(const CallRef& call) {
        if (!call->over() || calls_.erase(call) == 0) return;
        reactor_->forget(call->giving_up);
        for (const PartRef& part : std::vector<PartRef>(call->parts)) retire(*part);
        std::lock_guard lock(mutex_);
        --in_flight_;
    }

    // A caller who waits for late rows too is not refused for being late already.
    static int64_t deadline_for_owners(const Call& call, int64_t now) noexcept {
        if (call.deadline_ns == NO_DEADLINE) return NO_DEADLINE;
        if (call.patience_ns == 0) return call.deadline_ns - now;
        return std::max<int64_t>(0, call.deadline_ns - now) + call.patience_ns;
    }

    static uint64_t bit(int owner) noexcept { return uint64_t{1} << owner; }

    static constexpr int64_t HEDGE_MARGIN_NS = 1'000'000, HEDGE_PATIENCE_NS = 10'000'000;
    static constexpr int64_t RETRY_MIN_NS = 5'000'000, RETRY_MAX_NS = 100'000'000;

    const HubRef hub_;
    RemoteCounters& counters_;
    const ReactorRef reactor_;
    const RemoteVersionRef version_;
    std::unordered_set<CallRef> calls_;
    double hedges_saved_ = HEDGES_SAVED_MAX;
    std::mutex mutex_;
    std::vector<TicketRef> finished_;
    size_t in_flight_ = 0;
    bool closed_ = false;
};

}  // namespace treadle::dataplane
