// A request body as a job: parsed and checked against the version that it names before a row is read.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "frames.hpp"
#include "jobs.hpp"

namespace treadle::dataplane {

struct AskedLayer {
    const Layer* layer;
    const int64_t* ids;    // gather
    int64_t units;         // gather: ids; lookup: tokens
    int64_t first_unit;    // in the job
    uint64_t reply_at;     // bytes
};

// Units [0, ready()) are done. Pieces are claimed in order and end in any.
class Progress {
public:
    void done(int64_t first, int64_t last) {
        std::lock_guard lock(mutex_);
        ahead_.emplace(first, last);
        for (auto next = ahead_.begin(); next != ahead_.end() && next->first == ready_; next = ahead_.erase(next)) ready_ = next->second;
    }

    int64_t ready() {
        std::lock_guard lock(mutex_);
        return ready_;
    }

private:
    std::mutex mutex_;
    int64_t ready_ = 0;
    std::map<int64_t, int64_t> ahead_;
};

// One request in the works: what was asked, where the rows go, and how far it is. Kept by its job.
struct Request {
    VersionRef version;
    std::vector<AskedLayer> layers;
    kernels::WindowsView windows{};
    bool hashed = false;  // lookup
    int64_t units = 0;
    uint64_t reply_bytes = 0;
    std::byte* reply = nullptr;  // [reply_bytes], set before the job runs
    Progress progress;

    int64_t rows() const noexcept {
        int64_t rows = 0;
        for (const AskedLayer& asked : layers) rows += asked.units * rows_per_unit(asked);
        return rows;
    }

    int64_t rows_per_unit(const AskedLayer& asked) const noexcept { return hashed ? asked.layer->plan->columns() : 1; }

    // How many bytes, from the first on, are in `reply`.
    uint64_t ready_bytes() {
        const int64_t unit = progress.ready();
        for (const AskedLayer& asked : layers)
            if (unit < asked.first_unit + asked.units)
                return asked.reply_at + static_cast<uint64_t>((unit - asked.first_unit) * rows_per_unit(asked) * asked.layer->rows->row_bytes);
        return reply_bytes;
    }

    Fault run(int64_t first, int64_t last) {
        for (const AskedLayer& asked : layers) {
            const int64_t from = std::max(first, asked.first_unit) - asked.first_unit;
            const int64_t to = std::min(last, asked.first_unit + asked.units) - asked.first_unit;
            if (from >= to) continue;
            std::byte* out = reply + asked.reply_at + from * rows_per_unit(asked) * asked.layer->rows->row_bytes;
            const Fault fault = hashed ? look_up(asked, from, to, out) : asked.layer->rows->gather(asked.ids + from, to - from, out);
            if (fault != Fault::none) return fault;
        }
        progress.done(first, last);
        return Fault::none;
    }

private:
    // As lookup_rows; where not all rows are held here, each block of ids is checked before it is read.
    Fault look_up(const AskedLayer& asked, int64_t first, int64_t last, std::byte* out) noexcept {
        RowStore& rows = *asked.layer->rows;
        const Plan& plan = *asked.layer->plan;
        if (rows.held().empty()) return lookup_rows(plan.view, windows, first, last, rows, out);
        int64_t ids[kernels::LOOKUP_IDS];
        const int64_t tokens = kernels::LOOKUP_IDS / plan.columns();
        for (int64_t begin = first; begin < last; begin += tokens) {
            const int64_t end = std::min(last, begin + tokens);
            const int64_t count = (end - begin) * plan.columns();
            kernels::hash_rows(plan.view, windows, begin, end, ids);
            if (rows.first_bad(ids, count) >= 0) return Fault::out_of_range;
            if (const Fault fault = rows.gather(ids, count, out); fault != Fault::none) return fault;
            out += count * rows.row_bytes;
        }
        return Fault::none;
    }
};

// Why a request cannot be run; `text` is static.
struct Refusal {
    Fault fault = Fault::none;
    const char* text = "";

    explicit operator bool() const noexcept { return fault != Fault::none; }
};

// Reads a body from the front; everything it hands out lies inside.
class BodyReader {
public:
    BodyReader(const std::byte* body, uint64_t bytes) : at_(body), left_(bytes) {}

    template <typename T>
    const T* take(int64_t count) noexcept {
        if (count < 0 || static_cast<uint64_t>(count) > left_ / sizeof(T)) return nullptr;
        const uint64_t bytes = padded(static_cast<uint64_t>(count) * sizeof(T));
        if (bytes > left_) return nullptr;
        const T* taken = reinterpret_cast<const T*>(at_);
        at_ += bytes;
        left_ -= bytes;
        return taken;
    }

    bool empty() const noexcept { return left_ == 0; }

private:
    const std::byte* at_;  // aligned to 8 bytes: everything before it was padded
    uint64_t left_;
};

inline bool is_mask(const std::byte* mask, int64_t count) noexcept {
    return std::all_of(mask, mask + count, [](std::byte value) { return value <= std::byte{1}; });  // else it is no bool
}

inline Refusal read_windows(BodyReader& body, kernels::WindowsView& view) noexcept {
    const WindowsHead* head = body.take<WindowsHead>(1);
    if (!head || head->tokens < 0 || head->tokens > TOKENS_MAX || head->requests < 0 || head->requests > head->tokens + 1 ||
        head->columns < 0 || head->columns > LOOKBACK_MAX || head->dead > 1 || head->lookback_dead > 1)
        return {Fault::invalid, "windows: counts"};
    const int64_t backs = head->requests * head->columns;
    view.token_count = head->tokens;
    view.request_count = head->requests;
    view.lookback_columns = head->columns;
    view.tokens = body.take<int64_t>(head->tokens);
    view.lookback = body.take<int64_t>(backs);
    view.starts = body.take<int32_t>(head->requests + 1);
    const std::byte* dead = head->dead ? body.take<std::byte>(head->tokens) : nullptr;
    const std::byte* lookback_dead = head->lookback_dead ? body.take<std::byte>(backs) : nullptr;
    if (!view.tokens || !view.lookback || !view.starts || (head->dead && !dead) || (head->lookback_dead && !lookback_dead) || !body.empty())
        return {Fault::invalid, "windows: length"};
    if ((dead && !is_mask(dead, head->tokens)) || (lookback_dead && !is_mask(lookback_dead, backs))) return {Fault::invalid, "windows: masks"};
    view.dead = reinterpret_cast<const bool*>(dead);
    view.lookback_dead = reinterpret_cast<const bool*>(lookback_dead);
    if (view.starts[0] != 0 || view.starts[head->requests] != head->tokens ||
        !std::is_sorted(view.starts, view.starts + head->requests + 1))
        return {Fault::invalid, "windows: starts"};
    if (std::any_of(view.tokens, view.tokens + head->tokens, [](int64_t id) { return id < 0; }) ||
        std::any_of(view.lookback, view.lookback + backs, [](int64_t id) { return id < -1; }))
        return {Fault::invalid, "windows: negative ids"};
    return {};
}

inline Refusal add_layers(Request& request, const LayerAsk* asks, uint32_t count) {
    for (uint32_t i = 0; i < count; ++i) {
        const Layer* layer = request.version->layer(asks[i].layer);
        if (!layer) return {Fault::not_found, "no such layer"};
        if (asks[i].ids < 0 || asks[i].ids > IDS_MAX) return {Fault::invalid, "layers: ids"};
        for (const AskedLayer& other : request.layers)
            if (other.layer == layer) return {Fault::invalid, "layers: each one once"};
        request.layers.push_back({layer, nullptr, asks[i].ids, 0, 0});
    }
    return {};
}

inline Refusal read_gather(Request& request, BodyReader& body) {
    for (AskedLayer& asked : request.layers) {
        asked.ids = body.take<int64_t>(asked.units);
        if (!asked.ids) return {Fault::invalid, "ids: length"};
        if (asked.layer->rows->first_bad(asked.ids, asked.units) >= 0) return {Fault::out_of_range, "a row id that is not here"};
    }
    return body.empty() ? Refusal{} : Refusal{Fault::invalid, "bytes behind the ids"};
}

inline Refusal read_lookup(Request& request, BodyReader& body) {
    if (const Refusal refusal = read_windows(body, request.windows)) return refusal;
    for (AskedLayer& asked : request.layers) {
        const kernels::HashPlanView& plan = asked.layer->plan->view;
        if (request.windows.lookback_columns < plan.order_max - 1) return {Fault::invalid, "windows: look-back is too short for the model"};
        if (!kernels::tokens_in_range(plan, request.windows)) return {Fault::out_of_range, "a token id outside the vocabulary"};
        if (request.windows.token_count * asked.layer->plan->columns() > IDS_MAX) return {Fault::invalid, "windows: too many rows"};
        asked.units = request.windows.token_count;
    }
    return {};
}

// Fills `request` from a body that lives as long as it. Nothing is read from the table; afterwards `reply_bytes` are needed.
inline Refusal read_request(Request& request, const FrameHeader& header, const std::byte* bytes) {
    if (header.layer_count == 0 || header.layer_count > LAYERS_MAX) return {Fault::invalid, "layers: 1 to 64"};
    BodyReader body(bytes, header.body_bytes);
    const LayerAsk* asks = body.take<LayerAsk>(header.layer_count);
    if (!asks) return {Fault::invalid, "layers: length"};
    request.hashed = header.kind == static_cast<uint16_t>(Kind::lookup);
    if (const Refusal refusal = add_layers(request, asks, header.layer_count)) return refusal;
    if (const Refusal refusal = request.hashed ? read_lookup(request, body) : read_gather(request, body)) return refusal;
    for (AskedLayer& asked : request.layers) {
        asked.first_unit = request.units;
        asked.reply_at = request.reply_bytes;
        request.units += asked.units;
        request.reply_bytes += static_cast<uint64_t>(asked.units * request.rows_per_unit(asked) * asked.layer->rows->row_bytes);
    }
    return {};
}

// The job keeps the request, and with it the version. What it costs is what its dearest layer costs: those of a model are alike.
inline Job request_job(std::shared_ptr<Request> request, int64_t piece_rows) {
    int64_t columns = 1, row_bytes = 1;
    Tier tier = Tier::memory;
    for (const AskedLayer& asked : request->layers) {
        columns = std::max(columns, request->rows_per_unit(asked));
        row_bytes = std::max(row_bytes, asked.layer->rows->row_bytes);
        tier = std::max(tier, asked.layer->rows->tier);
    }
    const int64_t units = request->units;
    return {[request = std::move(request)](int64_t first, int64_t last) { return request->run(first, last); }, units,
            std::max<int64_t>(1, piece_rows / columns), columns, row_bytes, tier};
}

}  // namespace treadle::dataplane
